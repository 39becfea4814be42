"""Tables on the terminal, charts and the HTML report of a run's folder."""
