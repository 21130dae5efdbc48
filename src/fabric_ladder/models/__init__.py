"""Models, and the techniques that change them."""
