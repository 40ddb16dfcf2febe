"""Profiling a server that nothing was prepared in: hooks and the agent are brought into its workers, and taken out.

    processes: which processes below a pid are the workers
    rights:    whether the kernel lets us attach to them, told before anything is tried
    bundle:    our modules as compiled code, for a target that has nothing of ours installed
    bootstrap: the first code that runs in the target; imports from the bundle
    guest:     runs in the target: the agent, the engine's hooks, the way out
    visit:     the client's side of one target, and `profile_pid` over all of them

Imports nothing: the target imports this package too, and needs half of it.
"""
