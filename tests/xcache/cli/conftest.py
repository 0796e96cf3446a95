"""The servers for the commands about remote stores."""

from support.engines import folder_engine as folder_engine
from support.engines import http_engine as http_engine
from support.engines import redis_engine as redis_engine
from support.secure_engines import authority as authority
from support.secure_engines import https_engine as https_engine
from support.secure_engines import impostors as impostors
from support.secure_engines import rediss_engine as rediss_engine
from support.secure_engines import shown as shown
