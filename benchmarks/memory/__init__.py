"""How much memory training and building take, over a closed form or a peer."""
