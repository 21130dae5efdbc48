"""Tools for before and after training: the doctor, generation, model cards."""
