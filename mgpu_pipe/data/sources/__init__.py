"""Data sources: files, plug-ins and demonstrations."""
