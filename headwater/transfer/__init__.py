"""What travels between processes: the peer contract and the channels that carry it.

Today: control messages between the front and its workers. Knows messages, not
what they mean; ``router`` and ``worker`` are its callers, ``app`` connects them.
"""
