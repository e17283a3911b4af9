"""The text of a TOML file: its values, its mistakes, and where in it everything stands."""
