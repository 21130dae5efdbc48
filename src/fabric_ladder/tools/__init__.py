"""Tools for before and after training: the doctor, generation, notebooks, model cards."""
