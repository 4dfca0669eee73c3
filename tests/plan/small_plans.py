"""Plans small enough to count their reads one by one."""

from hypothesis import strategies as st

from penstock.plan import AccessPlan, Explicit, FullShuffle


@st.composite
def plans(draw: st.DrawFn) -> AccessPlan:
    """Small plans of every shape: short last batches dropped or not, idle ranks, repeated and left-out samples."""
    samples = draw(st.integers(1, 40))
    epochs = draw(st.integers(1, 5))
    if draw(st.booleans()):
        order: FullShuffle | Explicit = FullShuffle(samples, draw(st.integers(0, 99)))
    else:
        ids = st.lists(st.integers(0, samples - 1), min_size=1, max_size=50)
        order = Explicit([draw(ids) for _ in range(epochs)], samples)
    split = draw(st.sampled_from(["balanced", "uniform", "strided", "imbalanced"]))
    return AccessPlan(
        order, draw(st.integers(1, 20)), epochs, draw(st.integers(1, 5)), split, draw(st.booleans())
    )
