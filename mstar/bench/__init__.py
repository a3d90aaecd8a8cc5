"""Workloads and reports: `mstar bench` measures any OpenAI-compatible server from outside, over HTTP.

One process, one thread, one event loop. From a command line to a table:

    cli ─► serve / suite ─► server      which models, which token ids are safe (httpx, before the clock starts)
                        ├─► plan        targets × prompts × arrivals: pure and seeded
                        ├─► load ─► http1 ─► completions ─► sse      the timed part
                        └─► summary ─► results ─► tables             records to numbers to JSON and tables
"""
