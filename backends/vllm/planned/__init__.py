"""The planner inside vLLM's metadata builders: `SYNCFREE_PLANNER=off|shadow|on`.

`on` serves metadata that the planner made; `shadow` serves vLLM's own and compares the planner's with it, field by
field. The builders are subclasses of vLLM's: whatever the planner does not serve (drafts, graph capture, refused
batches, any surprise) is built by vLLM itself, and captured graphs go on reading vLLM's own buffers.

`install.install()` gives the hooks; importing this package loads nothing.
"""
