"""Writes anew what the frames of the corpus mean: ``python -m tests.golden.reread``.

Look at the difference before you commit it: it is what has changed for peers.
"""

from tests.golden.corpus import GENERATIONS, Line, files, read, write
from tests.golden.reader import Reader


def main() -> None:
    for generation in GENERATIONS:
        for path in files(generation):
            reader, lines = Reader(generation), []
            for line in read(path):
                said = reader.read(line.frame)
                packs = reader.says_the_same(line.frame, said)
                lines.append(Line(line.frame, reader.meaning(line.frame, said), packs))
            write(path, lines)


if __name__ == "__main__":
    main()
