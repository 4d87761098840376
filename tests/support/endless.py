"""Run as a child: never ends."""

if __name__ == "__main__":
    while True:
        pass
