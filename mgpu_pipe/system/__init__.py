"""The machine, the file system and processes; no configuration is known here."""
