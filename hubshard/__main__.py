"""`python -m hubshard` is `hubshard`."""

from __future__ import annotations

from hubshard.cli import main

if __name__ == "__main__":
    main()
