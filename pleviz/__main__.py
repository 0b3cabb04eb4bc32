"""``python -m pleviz``."""

if __name__ == "__main__":  # row processes import this module again, and must not run it
    from pleviz.cli import main

    main()
