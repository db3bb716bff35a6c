"""Ground floor: the data types that flow between the rooms, and every rule a valid one obeys. Needs pydantic only."""
