"""Data files of the package; read through :mod:`importlib.resources`."""
