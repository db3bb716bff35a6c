"""Tables that Hypothesis draws."""

from hypothesis import strategies as st

from neuroshard.core.table import Table

some_tables = st.lists(
    st.builds(
        lambda rows, quarter, pooling: Table(
            name=f"{rows}-{quarter}", rows=rows, dim=4 * quarter, pooling_factor=pooling, reuse_bins=(1.0, *[0.0] * 16)
        ),
        st.integers(1, 10**9),
        st.integers(1, 64),
        st.floats(0, 100),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda table: table.name,
)
