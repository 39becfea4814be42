"""Tables on the terminal, plots and the HTML report of a run's folder."""
