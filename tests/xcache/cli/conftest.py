"""The servers for the commands about remote stores."""

from support.engines import folder_engine as folder_engine
from support.engines import http_engine as http_engine
from support.engines import redis_engine as redis_engine
