"""A record is a frozen dataclass: the standard library's own is the oracle."""

import copy
import dataclasses
import pickle
from dataclasses import dataclass, field

import pytest

from placement.record import record


@record
class Point:
    """Two numbers and where they are from."""

    x: int
    y: int = 2
    place: str = field(default="here", compare=False)
    names: list[str] = field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Oracle:
    x: int
    y: int = 2
    place: str = field(default="here", compare=False)
    names: list[str] = field(default_factory=list, compare=False, repr=False)


@record
class Nothing:
    """No fields, and a text of its own."""

    def __repr__(self):
        return "nothing"


@record
class Even:
    """What it is made of may be refused."""

    n: int

    def __post_init__(self):
        if self.n % 2:
            raise ValueError(f"{self.n} is odd")


MADE = [
    ((1,), {}),
    ((1, 3), {}),
    ((), {"x": 1}),
    ((1,), {"place": "there"}),
    ((1, 2, "a", ["b"]), {}),
    ((5,), {"y": 0}),
]


@pytest.mark.parametrize(("args", "named"), MADE)
def test_it_holds_shows_and_hashes_what_a_dataclass_does(args, named):
    ours, theirs = Point(*args, **named), Oracle(*args, **named)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert repr(ours) == repr(theirs).replace("Oracle", "Point")
    assert hash(ours) == hash(theirs)


@pytest.mark.parametrize(
    ("args", "named"), [((), {}), ((1, 2, "a", [], 5), {}), ((1,), {"x": 1}), ((1,), {"z": 1}), ((), {"y": 1})]
)
def test_wrong_arguments_are_refused(args, named):
    for cls in (Point, Oracle):
        with pytest.raises(TypeError):
            cls(*args, **named)


def test_equality_is_of_compared_fields_and_of_one_class():
    assert Point(1, place="a") == Point(1, place="b") != Point(2)
    assert Point(1) != Oracle(1)
    assert len({Point(1, place="a"), Point(1, place="b"), Nothing(), Nothing()}) == 2
    assert Point(1).names is not Point(1).names


def test_nothing_can_be_set_and_nothing_added():
    for change in (lambda p: setattr(p, "x", 3), lambda p: delattr(p, "x"), lambda p: setattr(p, "z", 3)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change(Point(1))
    with pytest.raises(AttributeError):
        object.__setattr__(Point(1), "z", 3)


def test_tools_for_dataclasses_take_it():
    point = Point(1, place="there", names=["a"])
    assert dataclasses.replace(point, x=4) == Point(4)
    assert dataclasses.replace(point, x=4).place == "there"
    for again in (copy.copy(point), copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert (again, again.place, again.names) == (point, "there", ["a"])
    match point:
        case Point(1, y):
            assert y == 2
        case _:
            pytest.fail("it does not match")


def test_own_methods_stay():
    assert repr(Nothing()) == "nothing"
    with pytest.raises(ValueError, match="3 is odd"):
        Even(3)
