"""Programs that print a table and write JSON, in folders by what they measure.

Every figure is a ratio in one run against a named peer. ``python -m benchmarks.<folder>.<name>`` runs one;
``python -m benchmarks`` runs those that a laptop finishes. Results are in ``benchmarks/results``.
"""
