"""Bridges to other libraries. Nothing here is imported unless it is asked for."""
