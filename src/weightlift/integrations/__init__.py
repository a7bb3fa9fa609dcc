"""Other systems: the only files that import them at module level. Nothing is imported until a module of this room is asked for."""
