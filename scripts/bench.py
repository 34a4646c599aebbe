"""Time minibert and its peers side by side; the same as `minibert bench`. python scripts/bench.py --help"""

from minibert.cli import bench

if __name__ == "__main__":
    bench()
