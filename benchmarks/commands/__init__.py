"""How long commands take: their starts, listings, pages and refusals."""
