"""The lockstep, pure: step numbers, teardown fences, fingerprints. No torch, sockets, clock or threads."""
