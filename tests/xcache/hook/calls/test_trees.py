"""The tree of a function's results is written without pickling, and read in another process."""

from __future__ import annotations

import collections
import copy
import dataclasses

import jax
import msgpack
import pytest

from xcache.hook.calls import trees
from xcache.hook.structure.encoding import CannotSkipError

Pair = collections.namedtuple("Pair", "left right")


@jax.tree_util.register_pytree_node_class
class Scaled(Pair):
    def tree_flatten(self):
        return (self.left,), self.right

    @classmethod
    def tree_unflatten(cls, right, children):
        return cls(*children, right)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    value: object
    kind: object = dataclasses.field(metadata={"static": True})


def structure(value):
    return jax.tree.structure(value)


def encoded(tree, arguments, again=None):
    return trees.encode(tree, trees.parts_of(arguments, arguments if again is None else again))


def through(tree, arguments, others=None):
    form = msgpack.unpackb(msgpack.packb(encoded(tree, arguments)))
    return trees.decode(form, arguments if others is None else others)


@pytest.mark.parametrize(
    "value", [1, None, (), [], {}, (1, [2, None], {"b": 1, "a": (2,)}), Pair(1, [2]), {3: 1, 1: 2}, [Pair({}, 1)]]
)
def test_trees_of_containers_come_back(value):
    assert through(structure(value), []) == structure(value)


def test_a_named_tuple_whose_fields_have_changed_is_another_one(monkeypatch):
    form = encoded(structure(Pair(1, 2)), [])
    monkeypatch.setitem(globals(), "Pair", collections.namedtuple("Pair", "right left"))
    with pytest.raises(CannotSkipError, match="other fields"):
        trees.decode(form, [])


def test_a_node_of_the_programs_own_refers_to_an_equal_one_of_the_arguments():
    def kind():
        """Stand for a function that the program holds."""

    argument = structure((1, {"state": Node([1, 2], kind)}))
    result = structure((Node([1, 2], kind), 3))
    assert through(result, [structure(4), argument]) == result
    # In another process the arguments' own objects take its place.
    other = structure((1, {"state": Node([1, 2], len)}))
    assert through(result, [structure(4), argument], [structure(4), other]) == structure((Node([1, 2], len), 3))


def test_a_list_in_the_data_of_a_node_is_another_one_even_if_it_holds_the_same():
    """A result may hold the list of either argument, which the program may change."""
    one, other = structure(Node({"a": 1}, ["layer"])), structure(Node({"a": 1}, ["layer"]))
    assert one == other
    held = [argument.node_data()[1] for argument in (one, other)]
    assert through(other, [one, other]).node_data()[1] is held[1]
    with pytest.raises(CannotSkipError):
        encoded(structure(Node({"a": 1}, ["layer"])), [one, other])


@pytest.mark.parametrize("data", [["layer"], {"a": 1}, ("a", ["b"])])
def test_data_that_a_node_makes_anew_each_time_count_by_their_content(data):
    """Nobody else has the list: the program's class returns another one each time."""
    first, again, result = (structure(Node(1, copy.deepcopy(data))) for _ in range(3))
    assert encoded(result, [first], [again]) == ["argument", 0, []]
    with pytest.raises(CannotSkipError):
        encoded(result, [first], [first])


def test_what_cannot_be_written_is_said():
    for value in (Node(1, "kind"), {("a", 1): 2}, [Node(1, object())]):
        with pytest.raises(CannotSkipError):
            encoded(structure(value), [structure((Node([1], "kind"),))])


def test_a_named_tuple_that_is_registered_as_a_node_of_its_own_is_not_written_as_one():
    """Its fields are not all that it consists of."""
    with pytest.raises(CannotSkipError):
        encoded(structure(Scaled([1], 2)), [])
    argument = structure(Scaled([1], 2))
    assert through(argument, [argument]) == argument


def test_a_form_names_no_class_but_a_named_tuple():
    for module, name in (("builtins", "list"), ("os", "system"), ("no", "where"), (__name__, "Node")):
        with pytest.raises(ValueError, match="named tuple"):
            trees.decode(["named", [module, name], []], [])
