"""Context parallelism: ranks share the tokens of every sequence."""
