"""Run as a child: eats memory until it is stopped."""

if __name__ == "__main__":
    hoard = []
    while True:
        hoard.append(bytes(16 << 20))
