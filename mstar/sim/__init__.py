"""Many ranks of the real decision code in one process, under a seeded order of events.

    check      `python -m mstar.sim.check`: run seeds, print, shrink and replay a failing one
    cli        `mstar simulate`: the same decisions as a capacity planner
    replay     `mstar replay`: a recorded broadcast, decided again without a model

Nothing here is used by a running server.
"""
