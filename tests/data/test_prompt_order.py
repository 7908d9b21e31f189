"""The order of prompts: a pure function of (seed, epoch, data)."""

from prompt_cases import LONG, plain, prepare

TEN = plain(*"abcdefghij")


def drawn(found, first, count):
    return [group.prompt for group in found.groups_at(first, count)]


def test_the_order_is_the_same_each_time():
    assert drawn(prepare(TEN), 0, 35) == drawn(prepare(TEN), 0, 35)


def test_every_epoch_is_another_permutation():
    epochs = [drawn(prepare(TEN), 10 * e, 10) for e in range(4)]
    assert all(sorted(epoch) == sorted("abcdefghij") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list("abcdefghij") not in epochs


def test_another_seed_or_other_data_is_another_order():
    first = drawn(prepare(TEN), 0, 10)
    assert first != drawn(prepare(TEN, seed=2), 0, 10)
    other = drawn(prepare(plain(*"abcdefghiJ")), 0, 10)
    assert [p.lower() for p in other] != first


def test_the_order_does_not_depend_on_how_many_are_drawn_at_once():
    found = prepare(TEN)
    whole = drawn(found, 0, 40)
    for size in (1, 3, 4, 7, 40):
        parts = [drawn(found, at, size) for at in range(0, 40, size)]
        assert [p for part in parts for p in part][:40] == whole
    assert drawn(found, 33, 4) == whole[33:37]  # nor on what was drawn before


def test_a_draw_across_the_edge_is_filled_from_the_next_epoch():
    found = prepare(TEN)
    edge = drawn(found, 8, 4)
    assert edge == drawn(found, 0, 10)[8:] + drawn(found, 10, 10)[:2]
    assert [group.prompt_offset for group in found.groups_at(8, 4)] == [8, 9, 10, 11]


def test_the_order_in_this_version_is_the_order_in_every_version():
    """A resumed run must draw what the first would have: change this only with the format."""
    assert "".join(drawn(prepare(TEN), 0, 20)) == "ajifhdcegbeahjicgbdf"


def test_a_draw_is_a_new_empty_group_each_time():
    found = prepare(TEN)
    first, again = found.groups_at(3, 1)[0], found.groups_at(3, 1)[0]
    first.rollouts.append("x")
    assert again.rollouts == [] and first.prompt_ids == again.prompt_ids


def test_without_shuffling_every_epoch_is_in_the_order_of_the_file():
    assert "".join(drawn(prepare(TEN, shuffle=False), 0, 25)) == "abcdefghijabcdefghijabcde"


def test_the_fingerprint_is_of_content_and_order():
    same = [prepare(TEN).fingerprint, prepare(TEN).fingerprint]
    other = [
        prepare(TEN[::-1]).fingerprint,
        prepare(TEN[:-1]).fingerprint,
        prepare(plain(*"abcdefghiJ")).fingerprint,
        prepare([row | {"answer": "x"} for row in TEN]).fingerprint,
        prepare([row | {"answer": "y"} for row in TEN]).fingerprint,
        prepare(TEN, template="{prompt}!").fingerprint,
    ]
    assert len({*same}) == 1 and len({*same, *other}) == 7


def test_the_fingerprint_depends_on_the_rows_that_are_left_out_and_not_on_the_limit():
    whole, two, three = (prepare(LONG, longest=n).fingerprint for n in (None, 2, 3))
    assert len({whole, two, three}) == 3
    assert (prepare(LONG, longest=4).fingerprint, prepare(LONG, longest=9).fingerprint) == (
        three, whole,
    )  # fmt: skip


def test_a_hundred_prompts_that_are_all_the_same_still_have_an_order():
    found = prepare(plain(*["a"] * 100))
    assert [g.prompt for g in found.groups_at(0, 150)] == ["a"] * 150
