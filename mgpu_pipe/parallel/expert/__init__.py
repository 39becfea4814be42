"""Expert parallelism: each rank keeps some of a layer's experts."""
