"""The functions of mutation.py that do not need mutmut."""
import importlib

import mutation


def test_decorators_are_applied_after_the_definition():
    text = 'import a\n\n\n@a.first\n@second(1)         # why\ndef f(x):\n    return x\n\n\ny = f(0)\n'
    expected = 'import a\n\n\ndef f(x):\n    return x\nf = second(1)(f)\nf = a.first(f)\n\n\ny = f(0)\n'
    assert mutation.without_decorators(text) == expected


def test_names_are_converted_to_those_of_mutmut_and_back():
    assert [*mutation.patterns(['common', 'common.embed', 'common.Embedder'])] == [
        'common.*', 'common.x_embed__*', 'common.xǁEmbedderǁ*']
    assert mutation.function_of('common.x_embed__mutmut_3') == 'common.embed'
    assert mutation.function_of('common.xǁEmbedderǁhead__mutmut_12') == 'common.Embedder.head'


def test_functions_of_known_mutants_without_effect_exist():
    for function in mutation.EQUIVALENT:
        module, name = function.split('.', 1)
        assert hasattr(importlib.import_module(module), name.split('.')[0]), function
