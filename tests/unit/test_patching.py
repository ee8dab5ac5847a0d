import pytest

from torchtune_adaptive.patching import replaced


class Parent:
    def name(self) -> str:
        return "parent"


class Child(Parent):
    @staticmethod
    def number() -> int:
        return 1


def test_members_are_other_ones_for_a_while():
    with replaced((Child, "number", staticmethod(lambda: 2)), (Child, "name", lambda self: "child")):
        assert (Child().number(), Child().name(), Parent().name()) == (2, "child", "parent")
    assert (Child().number(), Child().name()) == (1, "parent")
    assert "name" not in vars(Child)
    assert isinstance(vars(Child)["number"], staticmethod)


def failing_while_replaced():
    one, other = (Child, "number", staticmethod(lambda: 2)), (Child, "number", staticmethod(lambda: 3))
    with replaced(one, other):
        raise RuntimeError(f"number {Child.number()}")


def test_they_come_back_after_an_error_and_in_the_right_order():
    with pytest.raises(RuntimeError, match="number 3"):
        failing_while_replaced()
    assert Child.number() == 1
