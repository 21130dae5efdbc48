"""Tools beside training: generation, notebooks, the doctor."""
