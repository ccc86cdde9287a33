"""One device, one step: a frozen StepPlan in, a StepResult out.

Builds the ragged batch, owns the KV tensors, runs the model and chooses the
tokens. Does not know requests, queues, stop rules or text, nor which blocks
belong to whom: the plan says. Called by ``worker``; built by ``app``.
"""
