"""`python -m flashdraft` is the command `flashdraft`."""

from .cli import main

if __name__ == "__main__":
    main()
