"""Measuring plans: speed beside the limit of the machine, and beside other programs.

Every program that is measured runs in a process of its own (`worker`), so that its peak memory is
its own; `session` asks them in turn; `report` writes the figures down.
"""
