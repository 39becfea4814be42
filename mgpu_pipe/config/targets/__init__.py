"""Classes that a configuration names by ``_target_``: their check and their construction."""
