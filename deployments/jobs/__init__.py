"""What workers report: every write of a job in progress. See docs/jobs.md.

- `lease`: who may work on a job, and for how long (claim, heartbeat, fence)
- `recorder`: a running job's log lines, progress and cancel flag
- `states`: a generation's moves, by compare-and-set, with their history
- `builds`, `activations`: the two kinds of job
- `sweeper`: jobs that nobody works on
- `hosts`, `watch`, `usage`: facts of hosts, health of engines, usage from the gates
"""
