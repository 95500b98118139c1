"""Where the blocks of a row of activations are prepared: one row after another, or in the order of tiles."""

from __future__ import annotations

from dataclasses import dataclass

from levserve.jit.builder import Builder, Value


@dataclass(frozen=True)
class BlockPlaces:
    """Every block of a row has int8 numbers for each term, and a few words of 32 bits."""

    numbers: Value
    """The address of the first block's numbers in the first term."""
    number_strides: tuple[Value, Value]
    """Bytes from one block to the next, and from one term to the next."""
    words: Value
    word_strides: tuple[Value, Value, Value]
    """Bytes from one block to the next, from one term to the next, and from one kind of word to the next."""

    @staticmethod
    def at(
        builder: Builder,
        numbers: Value,
        number_strides: tuple[int, int],
        words: Value,
        word_strides: tuple[int, int, int],
    ) -> BlockPlaces:
        (by_block, by_term), of_words = (
            map(builder.constant, number_strides),
            map(builder.constant, word_strides),
        )
        word_block, word_term, word_kind = of_words
        return BlockPlaces(numbers, (by_block, by_term), words, (word_block, word_term, word_kind))

    def numbers_of(self, block: Value, term: int) -> Value:
        by_block, by_term = self.number_strides
        return self.numbers + (block * by_block + by_term * term)

    def word_of(self, block: Value, kind: int, term: int = 0) -> Value:
        by_block, by_term, by_kind = self.word_strides
        return self.words + (block * by_block + by_term * term + by_kind * kind)

    def or_else(self, condition: Value, other: BlockPlaces) -> BlockPlaces:
        """These places if the condition holds, and otherwise the others."""
        by_block, by_term = map(condition.select, self.number_strides, other.number_strides)
        word_block, word_term, word_kind = map(condition.select, self.word_strides, other.word_strides)
        return BlockPlaces(
            condition.select(self.numbers, other.numbers),
            (by_block, by_term),
            condition.select(self.words, other.words),
            (word_block, word_term, word_kind),
        )
