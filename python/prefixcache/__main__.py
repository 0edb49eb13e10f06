"""`python -m prefixcache`: the command of the same name."""

from prefixcache.cli.main import main

if __name__ == "__main__":
    main()
