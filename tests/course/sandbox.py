"""Code that runs in a separate process with a submission: the tests of a folder, or calls of its functions.

Only arrays and texts are sent from this process, as bytes; the grading process runs no code of the submission.
"""
import gc
import importlib
import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np


def enter(folder):
    """Changes to the folder, suppresses output, and makes the modules of the project unavailable for import."""
    os.setpgid(0, 0)                                # so that child processes can be killed
    os.chdir(folder)
    sys.stdout = sys.stderr = open(os.devnull, 'w')
    project = Path(__file__).parents[2]
    directories = {project, project / 'tests', *(project / 'tests').iterdir()}
    sys.path[:] = [path for path in sys.path if Path(path).resolve() not in directories]
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, '__file__', None) or '/').parent in directories:
            del sys.modules[name]


def named(error):
    """An error in one line"""
    return f'{type(error).__name__}: {error}'.strip()


# ---- tests


class Record:
    """A pytest plugin that sends [test, '' or the error] after each test, and sets a time limit"""

    def __init__(self, send, seconds):
        self.send, self.seconds, self.broken = send, seconds, ''

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken = report.longreprtext.strip().splitlines()[-1].removeprefix('E').strip()

    def pytest_internalerror(self, excinfo):        # sys.exit at the top of a script, for example
        self.broken = named(excinfo.value)

    def pytest_runtest_setup(self, item):
        # The limit is in seconds of CPU time, which does not depend on other work of the machine.
        signal.signal(signal.SIGPROF, self.stop)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)

    def stop(self, *_):
        raise TimeoutError(f'no end after {self.seconds} seconds')

    def pytest_runtest_logreport(self, report):
        if report.when == 'teardown':
            signal.setitimer(signal.ITIMER_PROF, 0)
        if report.when == 'call' or report.failed:
            crash = getattr(report.longrepr, 'reprcrash', None)
            reason = crash.message if crash else str(report.longrepr)
            # pytest adds code of the test to our message: remove it.
            reason = re.split(r'\n\s*assert ', reason)[0].removeprefix('AssertionError: ')
            self.send([report.nodeid.split('::')[-1], '' if report.passed else reason or 'AssertionError'])


def run_tests(folder, sender, arguments, seconds):
    """Runs the tests of a folder. Sends [test, error] for each, and [None, why] at the end."""
    def send(pair):
        sender.send_bytes(json.dumps(pair).replace(folder + '/', '').encode())
    enter(folder)
    os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'
    import pytest
    gc.freeze()                                     # faster garbage collection: torch has many objects
    record = Record(send, seconds)
    code = pytest.main([*arguments, '-q', '-p', 'no:cacheprovider', '--rootdir', folder], plugins=[record])
    send([None, record.broken or f'pytest ended with code {int(code)}'])


# ---- calls


def pack(plain, arrays=()):
    """JSON-serializable values and arrays, as bytes"""
    file = io.BytesIO()
    np.savez(file, *arrays, plain=json.dumps(plain))
    return file.getvalue()


def unpack(data):
    """-> the arguments of pack. Arrays of objects, which could run code, are rejected."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return json.loads(str(file['plain'])), [file[f'arr_{n}'] for n in range(len(file.files) - 1)]


def answer(folder, sender, script, calls):
    """Calls functions of a script. Each call is (function, arguments), where an argument is a JSON value or a Tensor of
    compare.py, given as ['tensor', index of its array, type, grad]. Sends the answer to each call: types and values of
    the outputs, then of the gradients; or the error."""
    enter(folder)
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(script.removesuffix('.py'))
    except BaseException as error:                  # also SystemExit
        return sender.send_bytes(pack(named(error)))
    for call in calls:
        try:
            reply = pack(*outcome(module, *unpack(call)))
        except BaseException as error:
            reply = pack(named(error).replace(folder + '/', ''))
        sender.send_bytes(reply)


def outcome(module, call, arrays):
    import torch
    torch.manual_seed(0)
    function, arguments, slope = call
    given, leaves = {}, {}
    for name, value in arguments.items():
        if isinstance(value, list) and value[:1] == ['tensor']:
            _, place, kind, grad = value
            value = torch.from_numpy(arrays[place]).to(getattr(torch, kind))
            if grad:
                leaves[name] = value.requires_grad_()
        given[name] = value
    kept = {name: value.detach().clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    result = getattr(module, function)(**given)
    changed = [name for name, value in kept.items() if not torch.equal(given[name].detach(), value)]
    if changed:
        raise ValueError(f'the argument {changed[0]} was modified')
    keys = sorted(result) if isinstance(result, dict) else []
    outputs = [result[key] for key in keys] or (result if isinstance(result, tuple) else [result])
    types, arrays = [], []
    for output in outputs:
        types.append(str(output.dtype) if isinstance(output, torch.Tensor) else type(output).__name__)
        arrays.append(torch.as_tensor(output).detach().double().numpy())
    differentiable = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
    if differentiable:
        # The loss may be multiplied, or be one term of a sum: gradients must be correct for any upstream gradient.
        slopes = [slope * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape) for t in differentiable]
        torch.autograd.backward(differentiable, slopes)
    for name, leaf in leaves.items() if differentiable else ():
        gradient = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).double()
        if arguments[name][3] == 'unit':            # a loss of unit vectors may differ off the sphere
            x = torch.nn.functional.normalize(leaf.detach().double(), dim=1)
            gradient -= (gradient * x).sum(dim=1, keepdim=True) * x
        types.append('gradient')
        arrays.append(gradient.numpy())
    return [keys, types], arrays
