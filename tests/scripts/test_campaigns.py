"""The verdict on a campaign."""

from __future__ import annotations

import pytest
from support.campaigns import Campaign


def test_a_campaign_that_tried_nothing_fails():
    campaign = Campaign(0, 0)
    with pytest.raises(AssertionError, match="tried nothing"):
        campaign.judge()
    campaign.fault()
    campaign.judge()


def test_a_campaign_that_saw_a_loss_fails():
    campaign = Campaign(None, 0)
    campaign.fault()
    campaign.problem("losses", "an entry went")
    with pytest.raises(AssertionError, match="losses: an entry went"):
        campaign.judge()
