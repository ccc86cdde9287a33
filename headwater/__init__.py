"""Headwater: a complete, portable LLM serving stack.

A request's journey is the package's layout: ``api`` -> ``recipe`` -> ``router``
-> ``prefill`` -> ``decode`` -> ``recipe`` -> ``api``, over ``kv``, ``engine``,
``model`` and ``numerics``. ``docs/design.md`` is the map.
"""

__version__ = "0.1.0"
