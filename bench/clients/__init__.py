"""Clients: one small class for each, over the library that an application would use, set as fits the case.

`base.Client` says what a load asks of them.
"""
