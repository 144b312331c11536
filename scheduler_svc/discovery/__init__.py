"""Which worker groups there are: by name (DNS), by registration, and by what operators say."""
