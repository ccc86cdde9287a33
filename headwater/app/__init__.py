"""Where rooms are joined: settings, command line, launcher, and the tools a person runs.

The only package that may import every other room (but the simulator). Holds no
algorithm: what serves a request lives in the rooms.
"""
