"""A held-back Ctrl-C arrives after the block, and only then."""

import os
import signal
import threading

import pytest

from clo_jax.interrupt import deferred_interrupt


def test_interrupt_waits_for_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
            done.append(True)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_can_be_let_through_earlier():
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupt() as raise_pending:
            raise_pending()
            os.kill(os.getpid(), signal.SIGINT)
            raise_pending()
            pytest.fail("not reached")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_interrupt_no_effect_and_other_threads_pass():
    with deferred_interrupt():
        pass
    ran = []

    def work():
        with deferred_interrupt() as raise_pending:
            raise_pending()
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran
