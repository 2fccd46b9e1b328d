"""`python -m streamfold`: the command line."""

from streamfold.cli.main import main

if __name__ == "__main__":
    main()
