"""What each command of the command line does; ``placement/cli.py`` puts them together.

A command is a function with click's decorators that returns its exit code and raises PlacementError, ``Failed`` or
click's own errors. Nothing heavy is imported until a command needs it.
"""
