"""Names of the categories of logs whose columns are known, in their order."""

from __future__ import annotations

CRITEO = tuple(f"C{number}" for number in range(1, 27))

AVAZU = (
    *(
        "hour",
        "C1",
        "banner_pos",
        "site_id",
        "site_domain",
        "site_category",
        "app_id",
        "app_domain",
        "app_category",
        "device_id",
        "device_ip",
        "device_model",
    ),
    *("device_type", "device_conn_type", *(f"C{number}" for number in range(14, 22))),
)
