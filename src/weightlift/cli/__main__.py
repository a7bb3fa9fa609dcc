"""`python -m weightlift.cli` is the `weightlift` command."""

from weightlift.cli.main import main

if __name__ == "__main__":
    main()
